"""What graph code may use of Holdfast while it runs. Exported by `holdfast` itself."""
