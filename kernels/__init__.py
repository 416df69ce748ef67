"""Build, launch and check serial draft walks. Knows nothing of experiments, Hydra or plots."""
