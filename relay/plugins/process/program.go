package process

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// program is what is started for a plugin.
type program struct {
	path string
	args []string // without the program's name
	env  []string // more variables
}

// findProgram returns the program of a plugin in dir: the command of its manifest, else the
// executable run. home is where it can write. A name without a slash is looked up in the PATH of this
// process, which is also the program's (pluginEnv).
func findProgram(dir, home string, m *PluginManifest) (program, error) {
	if m == nil || len(m.Command) == 0 {
		return program{path: filepath.Join(dir, runFile)}, nil
	}
	p := program{path: m.Command[0], args: m.Command[1:]}
	switch local, isLocal := strings.CutPrefix(p.path, "./"); {
	case isLocal && filepath.IsLocal(local):
		p.path = filepath.Join(dir, local)
	case filepath.IsAbs(p.path):
	case strings.Contains(p.path, "/"):
		return p, fmt.Errorf("command: %q is neither an absolute path, nor a path below the plugin's folder that begins with ./, nor a name", p.path)
	default:
		path, err := exec.LookPath(p.path)
		if err != nil {
			return p, fmt.Errorf("command: %w", err)
		}
		if p.path, err = filepath.Abs(path); err != nil {
			return p, err
		}
	}
	for name, value := range m.Env {
		// Only $HOME is expanded: other variables of the relay may be secrets.
		value = os.Expand(value, func(s string) string {
			if s == "HOME" {
				return home
			}
			return "$" + s
		})
		p.env = append(p.env, name+"="+value)
	}
	return p, checkProgram(p.path)
}

// checkProgram checks that only root and the user of this process can change the program of a command.
// Links are followed: many programs of a system are links. The folders above the program are not
// checked.
func checkProgram(path string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("command: %w", err)
	case !st.Mode().IsRegular() || st.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("command: %s is not an executable file", path)
	case st.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("command: other users may write %s; fix it with: chmod go-w %s", path, path)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("command: %s belongs to uid %d, who could change what the relay runs; use a program of root or of the relay's user", path, sys.Uid)
	}
	return nil
}

// readProgram is findProgram for a folder whose manifest has not been read. A folder without a
// manifest has the executable run.
func readProgram(dir, home string) (program, error) {
	raw, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if os.IsNotExist(err) {
		return findProgram(dir, home, nil)
	} else if err != nil {
		return program{}, err
	}
	m, err := ParseManifest(raw)
	if err != nil {
		return program{}, fmt.Errorf("%s: %w", manifestFile, err)
	}
	return findProgram(dir, home, m)
}
