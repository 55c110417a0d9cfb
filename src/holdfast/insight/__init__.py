"""Read-only views of runs, workers and the queue, for people and autoscalers."""
