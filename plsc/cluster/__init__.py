"""Clusters of an embedding set: spherical k-means for a number of clusters, graphs where it is not known."""
