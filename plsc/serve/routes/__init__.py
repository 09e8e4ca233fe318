"""Routes by resource; each file holds its endpoints and their schemas."""
