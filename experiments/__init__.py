"""One file, one question put to the hardware. Importable without Hydra: only `run` and `compose` import it, inside functions."""
