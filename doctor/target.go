package doctor

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"agentctl/config"
	"agentctl/daemon"
)

// Files of the system service: the EnvironmentFile and the token of its unit. The token reaches
// the service as a systemd credential, which this process does not have.
const (
	serviceEnvFile = "/etc/default/agentctl"
	serviceToken   = "/etc/agentctl/token"
)

// target is the installation under examination, with its configuration.
//
// The fields after config are copies: they are set even when the files are invalid, because
// the checks of the relay and of the token are most useful then.
type target struct {
	Options
	config     *config.Config // nil: configErr says why
	configErr  error
	configPath string // of the file, whether it exists or not

	relay, relayOrigin                    string
	tokenFile, caFile, caSHA256, stateDir string
}

// checks are all checks, in the order of the report.
func (t *target) checks() []check {
	daemon := &daemonAnswer{done: make(chan struct{})}
	return []check{
		{[]string{"config"}, one(func(context.Context) Finding { return t.checkConfig() })},
		{[]string{"state_dir"}, one(func(ctx context.Context) Finding { return t.checkStateDir(daemon.wait(ctx)) })},
		{[]string{"socket"}, one(t.checkSocket)},
		{[]string{"daemon"}, func(ctx context.Context) []Finding { return t.checkDaemon(ctx, daemon) }},
		{[]string{"clock"}, one(t.checkClock)},
		{[]string{"relay"}, func(ctx context.Context) []Finding { return t.checkRelay(ctx, daemon.wait(ctx)) }},
		{[]string{"join"}, one(func(ctx context.Context) Finding { return t.checkJoin(daemon.wait(ctx)) })},
		{[]string{"token"}, one(func(ctx context.Context) Finding { return t.checkToken(daemon.wait(ctx), time.Now()) })},
		{[]string{"service"}, one(t.checkService)},
	}
}

// daemonAnswer passes the daemon's status to the checks that need it.
//
// The check of the daemon closes done in all cases, so that the checks that wait for it go on
// when there is no daemon. status is written before the close and not changed after it, so
// that readers need no lock.
type daemonAnswer struct {
	done   chan struct{}  // closed when status is set
	status *daemon.Status // nil: the daemon did not answer
}

// wait waits for the daemon's status; nil when there is none.
//
// It also returns nil when ctx ends first, so that a check does not hang with the
// daemon.
func (a *daemonAnswer) wait(ctx context.Context) *daemon.Status {
	select {
	case <-a.done:
		return a.status
	case <-ctx.Done():
		return nil
	}
}

// isService reports whether the daemon under examination is the system's.
func (t *target) isService() bool { return t.Socket == config.ServiceSocket }

// resolve reads the configuration as the daemon would: the file, the environment (of the
// service: that of its EnvironmentFile) and the settings of o, which take precedence.
//
// Precedence, from low to high: defaults, the file, the EnvironmentFile, the environment of
// this process, o.Settings. The environment of a running service cannot be read without its
// rights, so that its EnvironmentFile stands for it.
func resolve(o Options) *target {
	t := &target{Options: o}
	env := map[string]string{}
	source := config.NewSource(o.ConfigFile)
	source.Flags = config.Settings{}
	if t.isService() {
		env = readEnvFile(serviceEnvFile)
		if o.ConfigFile == "" {
			source.Path = config.SystemPath
		}
		if env["AGENTCTL_STATE_DIR"] == "" {
			source.Flags["state_dir"] = config.Setting{Value: config.SystemStateDir, Origin: "the service"}
		}
	}
	source.LookupEnv = func(name string) (string, bool) {
		v := cmp.Or(os.Getenv(name), env[name])
		return v, v != ""
	}
	for key, s := range o.Settings {
		source.Flags[key] = s
	}
	t.configPath = source.Path
	t.config, t.configErr = source.Load()
	t.copySettings(source.Flags) // what is known when the files are invalid
	if t.configErr == nil {
		t.copySettings(t.config.Settings)
	}
	// The unit passes this file as a credential, so that no key names it.
	if _, err := os.Lstat(serviceToken); t.isService() && t.tokenFile == "" && err == nil {
		t.tokenFile = serviceToken
	}
	return t
}

// copySettings sets the copies of settings that the checks use.
func (t *target) copySettings(settings config.Settings) {
	text := func(key string) string {
		s, _ := settings[key].Value.(string)
		return s
	}
	t.relay, t.relayOrigin = text("relay"), settings["relay"].Origin
	t.tokenFile, t.caFile, t.caSHA256 = text("token_file"), text("ca_file"), text("ca_sha256")
	t.stateDir = cmp.Or(text("state_dir"), config.DefaultStateDir(""))
}

// fallback returns the target as far as it is known without reading files. err is why they were not
// read.
func fallback(o Options, err error) *target {
	t := &target{Options: o, configErr: err, configPath: o.ConfigFile}
	t.copySettings(o.Settings)
	if _, isSet := o.Settings["state_dir"]; t.isService() && !isSet {
		t.stateDir = config.SystemStateDir
	}
	return t
}

// readEnvFile reads the VARIABLE=VALUE lines of an EnvironmentFile (systemd.exec(5)),
// without continued lines and escapes.
//
// A line that it cannot read is left out without an error: the file belongs to systemd, and a
// wrong guess here would hide what other checks find.
func readEnvFile(path string) map[string]string {
	env := map[string]string{}
	f, err := os.Open(path)
	if err != nil {
		return env
	}
	defer func() { _ = f.Close() }()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		name, value, isPair := strings.Cut(strings.TrimSpace(sc.Text()), "=")
		if isPair && !strings.HasPrefix(name, "#") {
			env[name] = strings.Trim(value, `"'`)
		}
	}
	return env
}

// checkConfig reports what resolve read.
//
// Only the first of several errors is shown: `agentctl config validate` shows all of them. A
// configuration without any file is fine, since every key has a default.
func (t *target) checkConfig() Finding {
	const name = "config"
	var all config.Errors
	switch {
	case errors.As(t.configErr, &all) && len(all) > 1:
		return fail(name, fmt.Sprintf("%v (and %d more)", all[0], len(all)-1), "see all of it: agentctl config validate")
	case t.configErr != nil:
		return fail(name, t.configErr.Error(), "correct it, then: agentctl config validate")
	case len(t.config.Files) == 0:
		return ok(name, "no file at "+t.configPath+"; flags, environment and defaults apply")
	case len(t.config.Notes) > 0:
		return ok(name, strings.Join(t.config.Files, ", ")+"; "+t.config.Notes[0])
	}
	return ok(name, strings.Join(t.config.Files, ", "))
}
