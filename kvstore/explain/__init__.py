"""Why a prompt would hit or miss, found without touching anything."""
