"""What runs inside SGLang's processes: hooks on its scheduler, no fork. Loaded through its plug-in entry point."""
