"""The whole way once, on the built-in identities: train, evaluate on unseen ones, embed, index, search, export."""
