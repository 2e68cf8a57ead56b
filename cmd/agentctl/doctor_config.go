package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"agentctl/config"
)

// resolve reads the daemon's configuration as the daemon would: the files, the environment
// (for the service, that of its EnvironmentFile), and flags over all.
func (p *patient) resolve() {
	vars := map[string]string{}
	src := config.NewSource(p.config)
	if p.service() {
		vars = envFile(serviceEnvFile)
		if p.config == "" {
			src.Path = config.SystemPath
		}
	}
	src.LookupEnv = func(name string) (string, bool) {
		if v, ok := os.LookupEnv(name); ok && v != "" {
			return v, true
		}
		v, ok := vars[name]
		return v, ok
	}
	src.Flags = config.Settings{}
	for name, v := range map[string]string{"relay": p.relay, "token_file": p.tokenFile, "ca_file": p.caFile, "state_dir": p.stateDir} {
		if v != "" {
			src.Flags[name] = config.Setting{Value: v, Origin: "--" + flagName(name)}
		}
	}
	if _, ok := src.Flags["state_dir"]; p.service() && !ok && vars["AGENTCTL_STATE_DIR"] == "" {
		src.Flags["state_dir"] = config.Setting{Value: "/var/lib/agentctl", Origin: "the service"}
	}
	cfg, err := src.Load()
	p.cfg, p.cfgErr, p.cfgPath = cfg, err, src.Path
	if err != nil { // what was typed is better than nothing
		cfg = &config.Config{Settings: src.Flags}
	}
	for name, to := range map[string]*string{"relay": &p.relay, "token_file": &p.tokenFile, "ca_file": &p.caFile, "state_dir": &p.stateDir} {
		if s, ok := cfg.Settings[name]; ok {
			*to, _ = s.Value.(string)
		}
	}
	if p.stateDir == "" {
		p.stateDir = config.DefaultStateDir("")
	}
	p.relayFrom = cfg.Settings["relay"].Origin
	if _, err := os.Lstat(serviceToken); p.service() && p.tokenFile == "" && err == nil {
		p.tokenFile = serviceToken
	}
}

// envFile reads VARIABLE=VALUE lines as systemd does, without its finer points.
func envFile(path string) map[string]string {
	vars := map[string]string{}
	f, err := os.Open(path)
	if err != nil {
		return vars
	}
	defer func() { _ = f.Close() }()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		k, v, ok := strings.Cut(strings.TrimSpace(sc.Text()), "=")
		if ok && !strings.HasPrefix(k, "#") {
			vars[k] = strings.Trim(v, `"'`)
		}
	}
	return vars
}

// configFinding judges what resolve read.
func (p *patient) configFinding() finding {
	const name = "config"
	var all config.Errors
	switch {
	case errors.As(p.cfgErr, &all) && len(all) > 1:
		return finding{name, findFail, fmt.Sprintf("%v (and %d more)", all[0], len(all)-1), "see all of it: agentctl config validate"}
	case p.cfgErr != nil:
		return finding{name, findFail, p.cfgErr.Error(), "correct it, then: agentctl config validate"}
	case len(p.cfg.Files) == 0:
		return finding{name, findOK, "no file at " + p.cfgPath + "; flags, environment and defaults hold", ""}
	case len(p.cfg.Notes) > 0:
		return finding{name, findOK, strings.Join(p.cfg.Files, ", ") + "; " + p.cfg.Notes[0], ""}
	}
	return finding{name, findOK, strings.Join(p.cfg.Files, ", "), ""}
}
