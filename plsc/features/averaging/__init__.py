"""Averages of the backbone's weights in the place of its gradients: local SGD and its kin."""
