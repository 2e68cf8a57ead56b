package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"agentctl/atomicfile"
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
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("save the settings: %w", err)
	}
	if err := atomicfile.Replace(path, text); err != nil {
		return fmt.Errorf("save the settings: %w", err)
	}
	return nil
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

// KeyNames returns the names of all keys, sorted.
func KeyNames() []string {
	names := make([]string, len(keys))
	for i := range keys {
		names[i] = keys[i].Name
	}
	slices.Sort(names)
	return names
}
