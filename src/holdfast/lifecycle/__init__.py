"""Starting, stopping and recovering: event loop, back-off, cancelling tasks, waiting for descriptors."""
