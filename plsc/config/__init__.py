"""Configuration of a training run: every key with its type, default and meaning.

:func:`load` reads a TOML file strictly and lays ``--KEY VALUE`` overrides over it: an unknown key, a value of
the wrong type or out of range is a :class:`UsageError` that names the key and the nearest right one.
:func:`to_toml` writes a configuration whole; :func:`load` reads it back equal. The package imports torch within
functions only: ``--help`` and mistyped keys are answered without it.
"""

from plsc.config.checks import check_together as check_together
from plsc.config.class_tables import ClassTable as ClassTable
from plsc.config.class_tables import class_tables as class_tables
from plsc.config.data import DataConfig as DataConfig
from plsc.config.head import HeadConfig as HeadConfig
from plsc.config.head import make_margin as make_margin
from plsc.config.head import margin_keys as margin_keys
from plsc.config.listing import describe as describe
from plsc.config.listing import section_meaning as section_meaning
from plsc.config.loading import KEYS as KEYS
from plsc.config.loading import SHIPPED as SHIPPED
from plsc.config.loading import TABLES as TABLES
from plsc.config.loading import changes_to_toml as changes_to_toml
from plsc.config.loading import differences as differences
from plsc.config.loading import from_dict as from_dict
from plsc.config.loading import load as load
from plsc.config.loading import parse_arguments as parse_arguments
from plsc.config.loading import sections as sections
from plsc.config.loading import shipped as shipped
from plsc.config.loading import shown as shown
from plsc.config.loading import to_dict as to_dict
from plsc.config.loading import to_toml as to_toml
from plsc.config.optim import OptimConfig as OptimConfig
from plsc.config.parallel import ParallelConfig as ParallelConfig
from plsc.config.sections import Config as Config
from plsc.config.sections import KeepConfig as KeepConfig
from plsc.config.sections import get as get
from plsc.config.stages import begins_course as begins_course
from plsc.config.stages import changes_of as changes_of
from plsc.config.stages import stage_configs as stage_configs
from plsc.feature_config import FEATURES as FEATURES
from plsc.feature_config import FeatureConfig as FeatureConfig
