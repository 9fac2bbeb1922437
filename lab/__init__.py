"""The lab: a small, real RL job whose collapses have known causes, each with its healthy twin."""
