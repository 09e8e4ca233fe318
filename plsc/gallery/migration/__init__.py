"""What a move of a gallery to another model needs beside its store: estimated embeddings, and a judgement of both."""
