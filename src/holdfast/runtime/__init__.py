"""What graph code may ask of Holdfast while its run is executed."""
