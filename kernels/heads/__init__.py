"""One file a head: its weights and its exact reference step."""
