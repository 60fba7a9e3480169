"""Linear and state-space layers over packed sequences that several ranks share: delta rules, Mamba-2, convolutions."""

from hdpcomm.attention.linear.api import delta_rule, ssd
from hdpcomm.attention.linear.conv import short_conv

__all__ = ["delta_rule", "short_conv", "ssd"]
