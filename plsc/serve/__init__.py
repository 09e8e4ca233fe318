"""The HTTP service: a model and a gallery behind /v1, the Open Inference Protocol, metrics and a page."""
