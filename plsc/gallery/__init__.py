"""The gallery: durable, searchable stores of persons and their face embeddings, with verified deletion."""
