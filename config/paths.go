package config

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// Default paths. A process of root uses those of the system service, however it was started;
// systemd's variables (systemd.exec(5)) take precedence.
const (
	// SystemPath is the configuration file of the service.
	SystemPath = "/etc/agentctl/config.yaml"
	// SystemStateDir is the state directory of the service.
	SystemStateDir = "/var/lib/agentctl"
	// ServiceSocket is where agentctl.socket listens.
	ServiceSocket = "/run/agentctl/agentctl.sock"
	// DefaultJournalSocket is where agentctl-journal.socket listens. It is not in /run/agentctl, which
	// the daemon's user may not enter.
	DefaultJournalSocket = "/run/agentctl-journal.sock"
	// DefaultProcessesSocket is where agentctl-processes.socket listens.
	DefaultProcessesSocket = "/run/agentctl-processes.sock"
)

// DefaultPath returns the configuration file of the service, or of an ordinary user.
//
// A service that systemd runs under a dedicated user (DynamicUser) is known by its
// STATE_DIRECTORY below /var/lib.
func DefaultPath() string {
	if isRoot() || strings.HasPrefix(os.Getenv("STATE_DIRECTORY"), "/var/lib/") {
		return SystemPath
	}
	return filepath.Join(userDir("XDG_CONFIG_HOME", ".config"), "agentctl", "config.yaml")
}

// DefaultStateDir returns where a service or an ordinary user keeps state: sub is "" for the
// device, "relay" for the relay. The two services have a directory each, because each
// belongs to another user.
func DefaultStateDir(sub string) string {
	if d := firstOf("STATE_DIRECTORY"); d != "" {
		return d
	}
	if isRoot() {
		return strings.TrimSuffix(SystemStateDir+"-"+sub, "-")
	}
	return filepath.Join(userDir("XDG_STATE_HOME", ".local/state"), "agentctl", sub)
}

// ContextDir returns the directory of this user's contexts, see package login. Root has a home
// directory too: a context belongs to a person.
func ContextDir() string {
	return filepath.Join(userDir("XDG_CONFIG_HOME", ".config"), "agentctl", "contexts")
}

// DefaultSocket returns the path of the control socket that a daemon of this user opens.
//
// The order is: systemd's RUNTIME_DIRECTORY, /run/agentctl for root, XDG_RUNTIME_DIR, and the
// temporary directory, where the user id keeps the sockets of two users separate.
func DefaultSocket() string {
	if d := firstOf("RUNTIME_DIRECTORY"); d != "" {
		return filepath.Join(d, "agentctl.sock")
	}
	if isRoot() {
		return ServiceSocket
	}
	if d := os.Getenv("XDG_RUNTIME_DIR"); d != "" {
		return filepath.Join(d, "agentctl", "agentctl.sock")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("agentctl-%d", os.Geteuid()), "agentctl.sock")
}

// ClientSocket returns the control socket that a command connects to: the user's own daemon's
// where there is one, else the service's where that is installed.
//
// The choice is by existence and not by a connection, because it is the default of a flag and
// shown by --help.
func ClientSocket() string {
	own := DefaultSocket()
	if exists(own) || !exists(filepath.Dir(ServiceSocket)) {
		return own
	}
	return ServiceSocket
}

// Credential returns the path of the systemd credential name, "" when there is none. The units
// set a blank default (SetCredential=), which counts as none.
func Credential(name string) string {
	dir := os.Getenv("CREDENTIALS_DIRECTORY")
	if dir == "" {
		return ""
	}
	path := filepath.Join(dir, name)
	if b, err := os.ReadFile(path); err != nil || len(bytes.TrimSpace(b)) == 0 {
		return ""
	}
	return path
}

// isRoot reports whether this process runs with root's effective user id, as under sudo.
func isRoot() bool { return os.Geteuid() == 0 }

// exists reports whether there is anything at path, a dangling symbolic link included.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// firstOf returns the first entry of a variable that holds a list of paths. systemd separates
// several directories of a unit with colons (systemd.exec(5)).
func firstOf(variable string) string {
	first, _, _ := strings.Cut(os.Getenv(variable), ":")
	return first
}

// userDir returns a directory of the XDG base directory specification, which is used on macOS,
// too. below is its default in the home directory; on Windows it is APPDATA. Without HOME the path
// is relative to the working directory.
func userDir(variable, below string) string {
	if d := os.Getenv(variable); d != "" {
		return d
	}
	if d := os.Getenv("APPDATA"); runtime.GOOS == "windows" && d != "" {
		return d
	}
	return filepath.Join(os.Getenv("HOME"), below)
}
