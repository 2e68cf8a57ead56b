package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"
)

// settingsHeader begins the file of saved settings.
//
// It warns a person who opens the file: saving rewrites all of it, without comments.
const settingsHeader = "# Saved by `agentctl config set` and by clients of the control socket. Takes precedence over\n" +
	"# config.yaml and conf.d; `agentctl config unset KEY` removes a line.\n"

// SaveSettings changes the file of saved settings; a nil value removes a key. A file that
// is not valid is left as it is, which is an error.
//
// Callers serialize their own calls (the daemon with a lock). Two processes that save at the
// same time both succeed, and the later one may undo the earlier: the file is changed by hand
// or by a person's command, rarely enough for that.
func SaveSettings(path string, change Settings) error {
	saved, errs := ReadFile(path)
	if IsMissing(errs) {
		saved, errs = Settings{}, nil
	}
	if len(errs) > 0 {
		return errs
	}
	for name, s := range change {
		if s.Value == nil {
			delete(saved, name)
		} else {
			saved[name] = s
		}
	}
	text, err := settingsText(saved)
	if err != nil {
		return err
	}
	return replaceFile(path, text)
}

// settingsText returns the content of a file with these settings.
//
// The keys are sorted by the YAML library, so that equal settings give equal bytes.
func settingsText(s Settings) ([]byte, error) {
	if len(s) == 0 {
		return []byte(settingsHeader), nil
	}
	values := map[string]any{}
	for name, v := range s {
		values[name] = Plain(v.Value)
	}
	b, err := yaml.Marshal(Nest(values))
	return append([]byte(settingsHeader), b...), err
}

// Nest moves the values of keys with a dot into maps, as a file has them.
//
// One level is enough: a name has at most one dot.
func Nest(values map[string]any) map[string]any {
	out := map[string]any{}
	for name, v := range values {
		group, leaf, nested := strings.Cut(name, ".")
		if !nested {
			out[name] = v
			continue
		}
		if out[group] == nil {
			out[group] = map[string]any{}
		}
		out[group].(map[string]any)[leaf] = v
	}
	return out
}

// replaceFile replaces a file atomically: after a power cut the file has either its old or
// its new content. It belongs to the owner of its directory, so that the daemon of the service
// can read a file that root saved.
//
// The steps are those of a durable rename: write and sync a temporary file in the same
// directory, rename it, sync the directory. The mode is 0600 (os.CreateTemp), because settings
// may name internal hosts.
func replaceFile(path string, text []byte) (err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("save the settings: %w", err)
	}
	f, err := os.CreateTemp(dir, ".settings-*")
	if err != nil {
		return fmt.Errorf("save the settings: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
			err = fmt.Errorf("save the settings: %w", err)
		}
	}()
	_, err = f.Write(text)
	// The owner is set before the rename: a reader must not find a file that it cannot open.
	if err == nil && os.Geteuid() == 0 {
		if st, serr := os.Stat(dir); serr == nil {
			owner := st.Sys().(*syscall.Stat_t)
			err = f.Chown(int(owner.Uid), int(owner.Gid))
		}
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}

// KeyNames returns the names of all keys, sorted.
func KeyNames() []string {
	names := make([]string, len(keys))
	for i := range keys {
		names[i] = keys[i].Name
	}
	slices.Sort(names)
	return names
}
