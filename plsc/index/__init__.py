"""Search over embedding sets: exact, or approximate with a measured recall."""

from plsc.index.index import Index as Index
from plsc.index.index import Neighbours as Neighbours
