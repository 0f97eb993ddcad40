"""Modules that no trace enters, as one op each."""
