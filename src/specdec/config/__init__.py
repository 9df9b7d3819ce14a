"""Every setting, of the engine, a request and the server, with its default and its range; no default is written elsewhere."""

from specdec.config.checks import ConfigError, from_dict
from specdec.config.choices import (
    ACCEPTANCES,
    AUTO,
    BLOCK_SIZE,
    DEFAULT_MODEL,
    DRAFTERS,
    KV_FORMATS,
    PRECISIONS,
    Precision,
    check_precision,
)
from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.config.serve import ServeConfig
from specdec.config.speculation import SpeculationConfig

__all__ = [
    "ACCEPTANCES",
    "AUTO",
    "BLOCK_SIZE",
    "DEFAULT_MODEL",
    "DRAFTERS",
    "KV_FORMATS",
    "PRECISIONS",
    "ConfigError",
    "EngineConfig",
    "Precision",
    "SamplingParams",
    "ServeConfig",
    "SpeculationConfig",
    "check_precision",
    "from_dict",
]
