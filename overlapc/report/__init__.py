"""What users read: tables from timelines. Torch-free."""
