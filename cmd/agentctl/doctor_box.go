package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"agentctl/config"
	"agentctl/control"
	"agentctl/daemon"
	"agentctl/prober"
	"agentctl/term"
)

// patient is the install that doctor looks at.
type patient struct {
	config, socket, stateDir, relay, tokenFile, caFile string

	// What resolve found.
	cfg       *config.Config // nil: cfgErr says why
	cfgErr    error
	cfgPath   string // of the file, whether it is there or not
	relayFrom string // who named the relay
}

const (
	serviceEnvFile = "/etc/default/agentctl"
	serviceToken   = "/etc/agentctl/token"
)

func (p *patient) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&p.socket, "socket", env("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	f.StringVar(&p.config, "config", env("AGENTCTL_CONFIG", ""), "configuration `FILE` of the daemon [AGENTCTL_CONFIG]")
	f.StringVar(&p.stateDir, "state-dir", "", "`DIR` of the daemon's state [AGENTCTL_STATE_DIR]")
	f.StringVar(&p.relay, "relay", "", "`URL` of the relay [AGENTCTL_RELAY]")
	f.StringVar(&p.tokenFile, "token-file", "", "`FILE` with the device token [AGENTCTL_TOKEN_FILE]")
	f.StringVar(&p.caFile, "ca-file", "", "PEM `FILE` of the authority that signed the relay's certificate [AGENTCTL_CA_FILE]")
}

// service tells whether the daemon that is asked is the system's.
func (p *patient) service() bool { return p.socket == config.ServiceSocket }

// checks are all there are, in the order they are shown.
func (p *patient) checks() []check {
	known := &answer{ready: make(chan struct{})}
	return []check{
		{[]string{"config"}, one(func(context.Context) finding { return p.configFinding() })},
		{[]string{"state_dir"}, one(func(ctx context.Context) finding { return p.checkStateDir(known.wait(ctx)) })},
		{[]string{"socket"}, one(p.checkSocket)},
		{[]string{"daemon"}, func(ctx context.Context) []finding { return p.checkDaemon(ctx, known) }},
		{[]string{"clock"}, one(checkClock)},
		{[]string{"relay"}, func(ctx context.Context) []finding { return p.checkRelay(ctx, known.wait(ctx)) }},
		{[]string{"token"}, one(func(ctx context.Context) finding { return p.checkToken(known.wait(ctx), time.Now()) })},
		{[]string{"service"}, one(p.checkService)},
	}
}

// answer is what the daemon said, for those who need to know its relay and its directory.
type answer struct {
	ready chan struct{} // closed when the daemon was asked
	st    *boxStatus    // nil: it said nothing
}

func (a *answer) wait(ctx context.Context) *boxStatus {
	select {
	case <-a.ready:
		return a.st
	case <-ctx.Done():
		return nil
	}
}

func one(fn func(context.Context) finding) func(context.Context) []finding {
	return func(ctx context.Context) []finding { return []finding{fn(ctx)} }
}

// checkStateDir looks at the directory the daemon says it uses, else at the configured one.
func (p *patient) checkStateDir(known *boxStatus) finding {
	const name = "state_dir"
	dir := p.stateDir
	if known != nil && known.Storage.Path != "" {
		dir = known.Storage.Path
		if st, err := os.Stat(dir); err == nil && !st.IsDir() { // of the history's file
			dir = filepath.Dir(dir)
		}
	}
	st, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return finding{name, findWarn, dir + " is not there yet", "the daemon makes it when it starts: agentctl run"}
	case errors.Is(err, fs.ErrPermission):
		return finding{name, findSkip, dir + " may not be looked at by this user", "sudo agentctl doctor"}
	case err != nil:
		return finding{name, findFail, err.Error(), "name another with --state-dir"}
	case !st.IsDir():
		return finding{name, findFail, dir + " is no directory", "name another with --state-dir"}
	}
	var fsys unix.Statfs_t
	if err := unix.Statfs(dir, &fsys); err != nil {
		return finding{name, findFail, fmt.Sprintf("statfs %s: %v", dir, err), "check the disk: dmesg"}
	}
	free := fsys.Bavail * uint64(fsys.Bsize)
	text := fmt.Sprintf("%s, %s free", dir, term.Bytes(free))
	switch {
	case fsys.Flags&unix.ST_RDONLY != 0:
		return finding{name, findFail, text + ", mounted read-only", "a card that fails turns read-only: see dmesg, then: sudo mount -o remount,rw " + mountPoint(dir)}
	case free < 16<<20:
		return finding{name, findFail, text, "make room: journalctl --vacuum-size=50M, apt-get clean"}
	case free < 200<<20:
		return finding{name, findWarn, text, "make room before it is full: journalctl --vacuum-size=50M, apt-get clean"}
	case st.Mode().Perm()&0o077 != 0 && st.Mode().Perm()&0o007 != 0:
		return finding{name, findWarn, fmt.Sprintf("%s, mode %04o: everybody may look into it", text, st.Mode().Perm()), "chmod 0700 " + dir}
	}
	return finding{name, findOK, text, ""}
}

// mountPoint is the directory that the file system of path is mounted on.
func mountPoint(path string) string {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "/"
	}
	device := func(p string) (dev uint64) {
		var st unix.Stat_t
		if unix.Stat(p, &st) == nil {
			dev = uint64(st.Dev)
		}
		return dev
	}
	for dev := device(path); path != "/" && device(filepath.Dir(path)) == dev; {
		path = filepath.Dir(path)
	}
	return path
}

func (p *patient) checkSocket(context.Context) finding {
	const name = "socket"
	st, err := os.Lstat(p.socket)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		next := "start the daemon: agentctl run"
		if p.service() {
			next = "start it: sudo systemctl start agentctl.socket agentctl"
		}
		return finding{name, findFail, p.socket + " is not there", next}
	case errors.Is(err, fs.ErrPermission):
		return finding{name, findFail, p.socket + " is closed to this user", "join the group: sudo usermod -aG " + control.Group + " $USER, then log in again"}
	case err != nil:
		return finding{name, findFail, err.Error(), ""}
	case st.Mode()&fs.ModeSocket == 0:
		return finding{name, findFail, p.socket + " is no socket", "remove it and restart the daemon"}
	case st.Mode().Perm()&0o007 != 0:
		return finding{name, findWarn, fmt.Sprintf("%s has mode %04o: everybody may connect", p.socket, st.Mode().Perm()), "chmod 0660 " + p.socket}
	}
	text := fmt.Sprintf("%s, %04o", p.socket, st.Mode().Perm())
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return finding{name, findOK, text, ""}
	}
	if g, err := user.LookupGroupId(fmt.Sprint(sys.Gid)); err == nil {
		text += " group " + g.Name
	}
	groups, _ := os.Getgroups()
	if uid := os.Geteuid(); uid != 0 && uint32(uid) != sys.Uid && !slices.Contains(groups, int(sys.Gid)) {
		return finding{name, findFail, text + ": this user is not in it", "join the group: sudo usermod -aG " + control.Group + " $USER, then log in again"}
	}
	return finding{name, findOK, text, ""}
}

// boxStatus is what doctor reads of the daemon's status.
type boxStatus struct {
	Version string `json:"version"`
	UptimeS int64  `json:"uptime_s"`
	Link    struct {
		State     string            `json:"state"`
		Relay     string            `json:"relay"`
		LastError *daemon.LinkError `json:"last_error"`
	} `json:"link"`
	Clock struct {
		State    string `json:"state"`
		OffsetMS int64  `json:"offset_ms"`
	} `json:"clock"`
	Storage struct {
		State  string `json:"state"`
		Path   string `json:"path"`
		Bytes  int64  `json:"bytes"`
		Detail string `json:"detail"`
	} `json:"storage"`
	Sampling struct {
		control.Sampling
		LastError    string               `json:"last_error"`
		DiskError    string               `json:"disk_error"`
		ModuleStates []prober.ModuleState `json:"module_states"`
	} `json:"sampling"`
	Config struct {
		Error         string   `json:"error"`
		RestartNeeded []string `json:"restart_needed"`
	} `json:"config"`
	CloneSuspected bool `json:"clone_suspected"`
}

// checkDaemon asks the daemon for all it knows. Its status is in known when it returns.
func (p *patient) checkDaemon(ctx context.Context, known *answer) []finding {
	var st *boxStatus
	defer func() { known.st = st; close(known.ready) }()
	cl, err := control.Dial(ctx, p.socket)
	if err != nil {
		next := "start it: agentctl run; as a service: sudo systemctl start agentctl, and see: journalctl -u agentctl"
		if errors.Is(err, control.ErrPermission) {
			next = "join the group: sudo usermod -aG " + control.Group + " $USER, then log in again"
		}
		return []finding{{"daemon", findFail, err.Error(), next}}
	}
	defer func() { _ = cl.Close() }()
	var s boxStatus
	if err := cl.Status(ctx, &s); err != nil {
		return []finding{{"daemon", findFail, err.Error(), "see its log: journalctl -u agentctl"}}
	}
	st = &s
	out := []finding{daemonFinding(st), samplingFinding(st), linkFinding(st), storageFinding(st)}
	var raw json.RawMessage
	err = cl.Call(ctx, control.MethodSnapshot, map[string]any{"modules": []string{"temperature", "power", "wear"}}, &raw)
	if err != nil {
		return append(out, finding{"power", findSkip, "this daemon does not tell: " + err.Error(), ""})
	}
	r, err := parseReading(raw)
	if err != nil {
		return append(out, finding{"power", findFail, err.Error(), ""})
	}
	return append(out, powerFinding(r), heatFinding(r), wearFinding(r))
}

func daemonFinding(s *boxStatus) finding {
	text := fmt.Sprintf("version %s, up %s", s.Version, time.Duration(s.UptimeS)*time.Second)
	const restart = "sudo systemctl restart agentctl, or however you run it"
	switch {
	case s.Config.Error != "":
		return finding{"daemon", findFail, text + "; it goes on with an older configuration: " + s.Config.Error, "agentctl config validate"}
	case s.Version != version:
		return finding{"daemon", findWarn, text + "; this command is " + version, restart}
	case len(s.Config.RestartNeeded) > 0:
		return finding{"daemon", findWarn, text + "; not in force before a restart: " + strings.Join(s.Config.RestartNeeded, ", "), restart}
	}
	return finding{"daemon", findOK, text, ""}
}

func samplingFinding(s *boxStatus) finding {
	switch {
	case s.Sampling.LastError != "":
		return finding{"sampling", findFail, "no sample: " + s.Sampling.LastError, "see its log: journalctl -u agentctl"}
	case !s.Sampling.Running:
		return finding{"sampling", findWarn, "stopped: nothing is recorded or pushed", "agentctl start"}
	}
	for _, m := range s.Sampling.ModuleStates {
		if m.State == "failing" || m.State == "hung" {
			return finding{"sampling", findWarn, fmt.Sprintf("module %s is %s: %s", m.Name, m.State, m.LastError), "see the kernel's log: dmesg; or leave it out: agentctl config set modules ..."}
		}
	}
	if e := s.Sampling.DiskError; e != "" {
		return finding{"sampling", findWarn, e, "mend that mount, or measure another: agentctl config set disk_path PATH"}
	}
	return finding{"sampling", findOK, samplingText(s.Sampling.Sampling), ""}
}

func linkFinding(s *boxStatus) finding {
	text := s.Link.State
	if s.Link.Relay != "" {
		text += ", " + s.Link.Relay
	}
	if e := s.Link.LastError; e != nil && s.Link.State != "ready" {
		text += ": " + e.Message
	}
	switch {
	case s.CloneSuspected:
		return finding{"link", findFail, text + "; another board uses the same token", "mint a token for each board: agentctl token create --class device"}
	case s.Link.State == "disabled":
		return finding{"link", findSkip, "no relay configured; this board works alone", ""}
	case s.Link.State == "ready":
		return finding{"link", findOK, text, ""}
	case s.Link.State == "connecting":
		return finding{"link", findWarn, text, "look again in a minute: agentctl status"}
	}
	return finding{"link", findFail, text, "see the lines relay and token"}
}

func storageFinding(s *boxStatus) finding {
	text := strings.TrimSpace(s.Storage.State + " " + s.Storage.Path)
	if s.Storage.Bytes > 0 {
		text += ", " + term.Bytes(uint64(s.Storage.Bytes))
	}
	switch {
	case s.Storage.State == "off" || s.Storage.State == "disabled":
		return finding{"history", findSkip, "no history is kept on disk", ""}
	case s.Storage.State == "ok":
		return finding{"history", findOK, text, ""}
	case s.Storage.State == "memory":
		return finding{"history", findWarn, text + ": what was recorded is lost at a restart", "see its log: journalctl -u agentctl"}
	}
	if s.Storage.Detail != "" {
		text += ": " + s.Storage.Detail
	}
	return finding{"history", findFail, text, "see the line state_dir, and its log: journalctl -u agentctl; it resumes by itself"}
}

func powerFinding(r reading) finding {
	text, bad := powerText(r.Values)
	switch {
	case text == "":
		return finding{"power", findSkip, "this machine does not tell about its supply", ""}
	case r.Values["power.under_voltage"] > 0:
		return finding{"power", findWarn, text, "use a stronger power supply and a short, thick cable: under-voltage damages cards"}
	case bad:
		return finding{"power", findWarn, text, "cool the board"}
	}
	return finding{"power", findOK, text, ""}
}

func heatFinding(r reading) finding {
	c, ok := r.Values["temperature.hottest_c"]
	text := term.Value(c, "C")
	switch {
	case !ok:
		return finding{"temperature", findSkip, "this machine has no sensor", ""}
	case c >= 80:
		return finding{"temperature", findWarn, text, "cool the board: a heat sink, air, a cooler place"}
	}
	return finding{"temperature", findOK, text, ""}
}

func wearFinding(r reading) finding {
	used, ok := r.Values["wear.used_pct"]
	eol, told := r.Values["wear.pre_eol"]
	text := fmt.Sprintf("%.0f %% of the card's life is used", used)
	const replace = "back up and replace the card"
	switch {
	case !ok && !told:
		return finding{"wear", findSkip, "this card does not tell (only eMMC does)", ""}
	case !ok:
		text = "reserved blocks: " + prober.EOLStates[min(int(eol), len(prober.EOLStates)-1)]
	}
	switch {
	case eol >= 2, used >= 100:
		return finding{"wear", findFail, text, replace + " now"}
	case eol >= 1, used >= 80:
		return finding{"wear", findWarn, text, replace + " soon"}
	}
	return finding{"wear", findOK, text, ""}
}

// checkClock looks at this machine's clock: certificates and tokens need it.
func checkClock(context.Context) finding {
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	return clockFinding(time.Now(), build().Time, err == nil && state != unix.TIME_ERROR && tx.Status&unix.STA_UNSYNC == 0)
}

func clockFinding(now, built time.Time, synced bool) finding {
	const name, next = "clock", "sudo timedatectl set-ntp true; without a network: sudo date -s 'YYYY-MM-DD hh:mm'"
	text := now.UTC().Format("2006-01-02 15:04:05 UTC")
	floor := time.Date(2023, 11, 14, 0, 0, 0, 0, time.UTC)
	if built.After(floor) {
		floor = built
	}
	switch {
	case now.Before(floor):
		return finding{name, findFail, text + " cannot be: this program was built later", next}
	case !synced:
		return finding{name, findWarn, text + ", not synchronised", next}
	}
	return finding{name, findOK, text + ", synchronised", ""}
}

// checkService asks systemd, where it runs.
func (p *patient) checkService(ctx context.Context) finding {
	const name = "service"
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return finding{name, findSkip, "systemd does not run here", ""}
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime-time.Second)
	defer cancel()
	b, err := exec.CommandContext(ctx, "systemctl", "show", "agentctl.service",
		"--property=LoadState,ActiveState,SubState,Result,NRestarts,UnitFileState").Output()
	if err != nil {
		return finding{name, findSkip, "systemctl: " + err.Error(), ""}
	}
	return serviceFinding(string(b))
}

func serviceFinding(show string) finding {
	const name = "service"
	v := map[string]string{}
	for line := range strings.Lines(show) {
		k, x, _ := strings.Cut(strings.TrimSpace(line), "=")
		v[k] = x
	}
	text := fmt.Sprintf("agentctl.service is %s (%s), %s at boot, %s restarts", v["ActiveState"], v["SubState"], v["UnitFileState"], v["NRestarts"])
	switch {
	case v["LoadState"] != "loaded":
		return finding{name, findSkip, "agentctl.service is not installed; the package agentctl brings it", ""}
	case v["ActiveState"] == "failed" || v["SubState"] == "auto-restart":
		return finding{name, findFail, text + ", result " + v["Result"], "journalctl -u agentctl -e; then: sudo systemctl restart agentctl"}
	case v["ActiveState"] != "active" && v["ActiveState"] != "activating":
		return finding{name, findWarn, text, "sudo systemctl enable --now agentctl"}
	case v["UnitFileState"] == "disabled":
		return finding{name, findWarn, text, "have it start at boot: sudo systemctl enable agentctl"}
	}
	return finding{name, findOK, text, ""}
}

// relayHost is the host and port of a relay's URL.
func relayHost(u *url.URL) (host, port string) {
	port = u.Port()
	if port == "" {
		port = map[string]string{"ws": "80", "http": "80"}[u.Scheme]
	}
	if port == "" {
		port = "443"
	}
	return u.Hostname(), port
}
