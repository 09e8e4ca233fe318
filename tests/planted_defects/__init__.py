"""Defects for tests/planted.py: each is a realistic mistake in one line, and the tests that guard against it.

Add one where a bug was found that no test would have told, beside the test that now does.
"""

from planted_defects.defect import Defect as Defect
from planted_defects.defect import planted as planted
from planted_defects.embedding import EMBEDDING
from planted_defects.head import HEAD
from planted_defects.on_gpus import ON_GPUS
from planted_defects.serving import SERVING
from planted_defects.training import TRAINING
from planted_defects.using import USING

DEFECTS = (*HEAD, *TRAINING, *ON_GPUS, *EMBEDDING, *USING, *SERVING)
