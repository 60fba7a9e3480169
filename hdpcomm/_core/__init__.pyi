# Type stubs of the compiled module; one file a room.
DTYPES: dict[str, int]

def build_info() -> dict[str, str | None]: ...
