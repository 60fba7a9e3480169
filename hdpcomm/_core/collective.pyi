DEFAULT_COSTS: dict[str, float]
DEVICE_COSTS: dict[str, float]

class DeviceTransportCosts:
    def __init__(
        self,
        *,
        alpha_s: float,
        message_s: float,
        beta_s_per_byte: float,
        gamma_s_per_byte: float,
        round_s: float,
        signal_s: float,
        read_s_per_byte: float,
        window_bytes: float = ...,
    ) -> None: ...
