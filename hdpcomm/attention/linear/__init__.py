"""Linear and state-space layers over packed sequences that several ranks share: delta rules, Mamba-2, convolutions."""

from hdpcomm.attention.linear.api import delta_rule, short_conv, ssd

__all__ = ["delta_rule", "short_conv", "ssd"]
