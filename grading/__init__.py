"""How answers are spelled."""
