"""Rare features of training, a folder each; :data:`plsc.feature_config.FEATURES` lists their sections."""
