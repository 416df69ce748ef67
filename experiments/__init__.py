"""One file, one question put to the hardware. Importable without Hydra: only `run` and `plan` use it, inside functions."""
