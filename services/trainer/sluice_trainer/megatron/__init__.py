"""Megatron-core, through its public layer spec."""

import warnings

# At each import Megatron says that TransformerEngine and apex are not there. They are not needed
# here.
warnings.filterwarnings("ignore", module=r"megatron\.core")
# Megatron calls collectives by names that newer torch has renamed.
warnings.filterwarnings("ignore", message=r".*is deprecated. Please use", category=FutureWarning)
