"""What `holdfast doctor` looks at: one small function for each check, none of which changes anything."""
