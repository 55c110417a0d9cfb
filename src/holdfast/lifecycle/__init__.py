"""Starting, stopping and outliving failures: event loop, back-off, cancelling tasks, waiting for descriptors."""
