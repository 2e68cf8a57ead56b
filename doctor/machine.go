package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentctl/daemon"
	"agentctl/term"
	"agentctl/transport/clock"
)

// Bounds of free space on the disk of the state directory, bytes.
//
// Below minFree the history cannot be written any more: SQLite needs space for its journal
// beside the file. Between both a log that grows fills the rest within days.
const (
	minFree  = 16 << 20
	wantFree = 200 << 20
)

// Bits of a file's mode that grant access to everybody, or to the group and everybody.
const (
	otherBits      = 0o007
	groupOtherBits = 0o077
)

// dirInUse is the state directory that the daemon uses, else the configured one. known is nil
// when the daemon did not answer.
//
// The path of the history shows which one that is, since a daemon may run with other flags than
// the configuration of this command.
func (t *target) dirInUse(known *daemon.Status) string {
	if known == nil || known.Storage.Path == "" {
		return t.stateDir
	}
	dir := known.Storage.Path
	// It is the path of the history file, which may not be written yet, or of the directory.
	if filepath.Base(dir) == daemon.HistoryFile {
		dir = filepath.Dir(dir)
	}
	return dir
}

// checkStateDir examines the state directory.
//
// The worst comes first: a read-only disk explains a full one, and either matters more than
// the mode.
func (t *target) checkStateDir(known *daemon.Status) Finding {
	const name, another = "state_dir", "set state_dir to another directory"
	dir := t.dirInUse(known)
	if known != nil && !known.StateDir.IsOK() { // first: a disk that hangs would hang this check
		return fail(name, fmt.Sprintf("%s is %s: %s", dir, known.StateDir.State, known.StateDir.Detail), known.StateDir.Hint())
	}
	st, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return warn(name, dir+" does not exist yet", "the daemon creates it when it starts: agentctl run")
	case errors.Is(err, fs.ErrPermission):
		return skip(name, dir+" is not readable by this user", "sudo agentctl doctor")
	case err != nil:
		return fail(name, err.Error(), another)
	case !st.IsDir():
		return fail(name, dir+" is not a directory", another)
	}
	var fsys unix.Statfs_t
	if err := unix.Statfs(dir, &fsys); err != nil {
		return fail(name, fmt.Sprintf("statfs %s: %v", dir, err), "check the disk: dmesg")
	}
	// Bavail and not Bfree: only root may use the reserved blocks, and the service is not root.
	free := fsys.Bavail * uint64(fsys.Bsize)
	text := fmt.Sprintf("%s, %s free", dir, term.Bytes(free))
	switch {
	case fsys.Flags&unix.ST_RDONLY != 0:
		return fail(name, text+", mounted read-only", "a card that fails turns read-only: see dmesg, then: sudo mount -o remount,rw "+mountPoint(dir))
	case free < minFree:
		return fail(name, text, "free some space: journalctl --vacuum-size=50M, apt-get clean")
	case free < wantFree:
		return warn(name, text, "free some space before it is full: journalctl --vacuum-size=50M, apt-get clean")
	case st.Mode().Perm()&otherBits != 0:
		return warn(name, fmt.Sprintf("%s, mode %04o: everybody may read it", text, st.Mode().Perm()), "chmod 0700 "+dir)
	case known != nil && len(known.StateDir.SetAside) > 0:
		for _, f := range known.StateDir.SetAside {
			text += "; " + f.Text()
		}
		return warn(name, text, known.StateDir.SetAsideHint())
	}
	return ok(name, text)
}

// mountPoint returns the directory that the file system of path is mounted on.
//
// It goes up until the device number changes. "/" is also the answer for a path that does not
// exist, where the remount is wrong but harmless.
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

// checkSocket examines the permissions of the control socket for this user.
//
// It only looks at the file: checkDaemon dials. A person who may not connect gets the group to
// join instead of a bare refusal.
func (t *target) checkSocket(context.Context) Finding {
	const name = "socket"
	st, err := os.Lstat(t.Socket)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		next := "start the daemon: agentctl run"
		if t.isService() {
			next = "start it: sudo systemctl start agentctl.socket agentctl"
		}
		return fail(name, t.Socket+" does not exist", next)
	case errors.Is(err, fs.ErrPermission):
		return fail(name, t.Socket+" is closed to this user", joinGroup)
	case err != nil:
		return fail(name, err.Error(), "check its directory: ls -ld "+filepath.Dir(t.Socket))
	case st.Mode()&fs.ModeSocket == 0:
		return fail(name, t.Socket+" is not a socket", "remove it and restart the daemon")
	case st.Mode().Perm()&otherBits != 0:
		return warn(name, fmt.Sprintf("%s has mode %04o: everybody may connect", t.Socket, st.Mode().Perm()), "chmod 0660 "+t.Socket)
	}
	text := fmt.Sprintf("%s, %04o", t.Socket, st.Mode().Perm())
	sys := st.Sys().(*syscall.Stat_t)
	if g, err := user.LookupGroupId(fmt.Sprint(sys.Gid)); err == nil {
		text += " group " + g.Name
	}
	// The groups are those of this process: a person who was added to the group has to log in
	// again, which joinGroup says.
	groups, _ := os.Getgroups()
	if uid := os.Geteuid(); uid != 0 && uint32(uid) != sys.Uid && !slices.Contains(groups, int(sys.Gid)) {
		return fail(name, text+": this user is not in it", joinGroup)
	}
	return ok(name, text)
}

// checkClock examines this machine's clock, on which certificates and tokens depend.
//
// The kernel's clock discipline says whether NTP keeps it right, whatever program does so:
// systemd-timesyncd, chrony or ntpd. A container that may not ask counts as not synchronized. The
// daemon asks in the same way (transport/clock).
func (t *target) checkClock(context.Context) Finding {
	return clockFinding(time.Now(), t.BuiltAt, clock.NTPSynchronized())
}

// firstRelease is a Unix time before every release, for a binary without its build time.
const firstRelease = 1_699_920_000 // 2023-11-14

// clockFinding reports an impossible time, or a clock that is not synchronized. synced is the
// kernel's state: whether NTP adjusts the clock (adjtimex(2)).
//
// A time before the build is certainly wrong, whatever NTP says. A clock that is not synchronized
// is a warning: it may still be right.
func clockFinding(now, built time.Time, synced bool) Finding {
	const name, next = "clock", "sudo timedatectl set-ntp true; without a network: sudo date -s 'YYYY-MM-DD hh:mm'"
	text := now.UTC().Format("2006-01-02 15:04:05 UTC")
	switch {
	case now.Before(built), now.Unix() < firstRelease:
		return fail(name, text+" is wrong: this program was built later", next)
	case !synced:
		return warn(name, text+", not synchronized", next)
	}
	return ok(name, text+", synchronized")
}

// checkService asks systemd for the state of agentctl.service.
//
// systemctl gets a second less than all checks: D-Bus may hang on a board in trouble.
func (t *target) checkService(ctx context.Context) Finding {
	const name = "service"
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return skip(name, "systemd does not run here", "")
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout-time.Second)
	defer cancel()
	b, err := exec.CommandContext(ctx, "systemctl", "show", "agentctl.service",
		"--property=LoadState,ActiveState,SubState,Result,NRestarts,UnitFileState").Output()
	if err != nil {
		return skip(name, "systemctl: "+err.Error(), "")
	}
	return serviceFinding(string(b))
}

// serviceFinding reports the output of systemctl show, a PROPERTY=VALUE on each line.
//
// A unit that is missing or that somebody stopped is no failure: the daemon may run without
// systemd. One that systemd gave up on, or starts again and again, is.
func serviceFinding(show string) Finding {
	const name = "service"
	properties := map[string]string{}
	for line := range strings.Lines(show) {
		property, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		properties[property] = value
	}
	get := func(property string) string { return properties[property] }
	active, sub, file := get("ActiveState"), get("SubState"), get("UnitFileState")
	text := fmt.Sprintf("agentctl.service is %s (%s), %s at boot, %s restarts", active, sub, file, get("NRestarts"))
	switch {
	case get("LoadState") != "loaded":
		return skip(name, "agentctl.service is not installed; the package agentctl installs it", "")
	case active == "failed" || sub == "auto-restart":
		return fail(name, text+", result "+get("Result"), "journalctl -u agentctl -e; then: sudo systemctl restart agentctl")
	case active != "active" && active != "activating":
		return warn(name, text, "sudo systemctl enable --now agentctl")
	case file == "disabled":
		return warn(name, text, "start it at boot: sudo systemctl enable agentctl")
	}
	return ok(name, text)
}
