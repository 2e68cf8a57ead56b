package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"
)

const settingsHeader = "# Kept by `agentctl config set` and by clients of the control socket. It counts more\n" +
	"# than config.yaml and conf.d; `agentctl config unset KEY` takes a line out.\n"

// SaveSettings changes the file of kept settings: a nil value takes a key out. The file
// is replaced as a whole, and belongs to the directory's owner.
func SaveSettings(path string, change Settings) error {
	kept, errs := ReadFile(path)
	if IsMissing(errs) {
		kept, errs = Settings{}, nil
	}
	if len(errs) > 0 {
		return errs
	}
	for name, s := range change {
		if s.Value == nil {
			delete(kept, name)
		} else {
			kept[name] = s
		}
	}
	text, err := settingsText(kept)
	if err != nil {
		return err
	}
	return replaceFile(path, text)
}

// settingsText writes settings as a file has them.
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

// Nest puts the values of keys with a dot into maps, as a file has them.
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

// replaceFile puts a file in the place of path, so that a power cut leaves one of both.
func replaceFile(path string, text []byte) (err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("keep the settings: %w", err)
	}
	f, err := os.CreateTemp(dir, ".settings-*")
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("keep the settings: %w; use sudo", err)
		}
		return fmt.Errorf("keep the settings: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
			err = fmt.Errorf("keep the settings: %w", err)
		}
	}()
	_, err = f.Write(text)
	if err == nil && os.Geteuid() == 0 { // the daemon of a service is somebody else
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

// KeyNames are the keys of the configuration in the order of the documentation.
func KeyNames() []string {
	names := make([]string, len(keys))
	for i := range keys {
		names[i] = keys[i].Name
	}
	slices.Sort(names)
	return names
}
