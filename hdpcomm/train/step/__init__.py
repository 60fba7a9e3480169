"""One step: passes, runner, trainer, and what they measure."""
