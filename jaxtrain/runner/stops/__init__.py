"""Why a run stops before its last step: guards, patience, signals, memory."""
