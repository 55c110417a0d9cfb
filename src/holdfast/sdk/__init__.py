"""The functions that graph code imports from `holdfast`: spawn, gather, ask, budget_left, record_usage."""
