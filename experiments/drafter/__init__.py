"""A target and its DSpark drafter, trained here, and the decoder that runs them: real weights and real rounds for the studies that need them."""
