"""One file a way to run a walk. A file that registers a class here is a backend; nothing else needs to know."""
