package config

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// View is what get_config answers, and `config show` prints.
type View struct {
	Files   []string          `json:"files"`
	Values  map[string]any    `json:"values"`
	Origins map[string]string `json:"origins"`
	Error   string            `json:"error,omitempty"`          // of files that are not in force
	Restart []string          `json:"restart_needed,omitempty"` // keys that changed, but not yet in the daemon
	Notes   []string          `json:"notes,omitempty"`
}

func (c *Config) View() View {
	v := View{Files: c.Files, Values: map[string]any{}, Origins: map[string]string{}, Notes: c.Notes}
	for name, s := range c.Settings {
		v.Values[name], v.Origins[name] = Plain(s.Value), s.Origin
	}
	return v
}

// Fingerprint changes with the files that a configuration is read from.
func (s Source) Fingerprint(c *Config) string {
	paths := []string{s.Path, c.SettingsPath()}
	others, err := s.confD()
	paths = append(paths, others...)
	var sb strings.Builder
	fmt.Fprintln(&sb, err)
	for _, path := range paths {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		fmt.Fprintln(&sb, path, err, st.Ino, st.Size, st.Mtim, st.Ctim, st.Mode)
	}
	return sb.String()
}
