"""The gallery: collections of persons and their faces that survive, are searched, and forget when told to."""
