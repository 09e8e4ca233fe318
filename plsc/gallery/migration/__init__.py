"""What a move of a gallery to another model needs beside its store: estimated embeddings, and a judgement of both."""

MAX_LOSS = 0.01  # of the true accept rate, that a cut-over may cost unless it is told otherwise
