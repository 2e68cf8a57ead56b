package main

import "os"

// configFinding judges the configuration file.
func configFinding(*patient) finding {
	const path = "/etc/agentctl/config.yaml"
	if _, err := os.Stat(path); err != nil {
		return finding{"config", findOK, "no file; flags, environment and defaults hold", ""}
	}
	return finding{"config", findOK, path, ""}
}
