package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"agentctl/atomicfile"
)

// settingsHeader begins the file of saved settings, and settingsEnd ends it.
//
// The header warns a person who opens the file: saving rewrites all of it, without comments. A
// file that begins so and does not end so was cut by a fault of the disk, which YAML alone does
// not show: every line of it that is left is valid.
const (
	settingsHeader = "# Saved by `agentctl config set` and by clients of the control socket. Takes precedence over\n" +
		"# config.yaml and conf.d; `agentctl config unset KEY` removes a line. Keep the last line.\n"
	settingsEnd = "# end\n"
)

// maxProblem bounds what is said about a damaged file, bytes.
const maxProblem = 512

// Reasons why a file of saved settings cannot be whole.
const (
	errSettingsEmpty = "the file is empty; remove it, or restore it from a backup"
	errSettingsCut   = "the file was cut: its last line, # end, is missing; check the settings in it, then add the line"
)

// readSaved is ReadFile for the file of saved settings, which it also checks to be whole. The
// settings that are valid are returned beside the errors.
func readSaved(path string) (Settings, Errors) {
	b, err := readRegular(path)
	if err != nil {
		return nil, Errors{err}
	}
	text := string(b)
	isCut := strings.HasPrefix(text, settingsHeader) && !strings.HasSuffix(strings.TrimSpace(text), strings.TrimSpace(settingsEnd)) ||
		strings.HasPrefix(settingsHeader, text)
	if isCut { // the last line may be half of one: 50 of 5000
		b = b[:strings.LastIndexByte(text, '\n')+1]
	}
	saved, errs := parseFile(path, b)
	switch {
	case text == "":
		errs = append(errs, &Error{Where: path, Problem: errSettingsEmpty})
	case isCut:
		errs = append(errs, &Error{Where: path, Problem: errSettingsCut})
	}
	return saved, errs
}

// setAsideSaved clears the place of new settings: it sets a damaged file aside, and saves what was
// valid in it. A file that only could not be read is left where it is.
func setAsideSaved(path string, valid Settings, errs Errors) *atomicfile.Damage {
	d := &atomicfile.Damage{Path: path, Problem: strings.ReplaceAll(PublicText(errs), "\n", "; ")}
	d.Problem = d.Problem[:min(len(d.Problem), maxProblem)]
	for _, err := range errs {
		var e *Error
		if !errors.As(err, &e) { // an error of the disk, or a lack of permission
			return d
		}
	}
	var err error
	if d.Aside, err = atomicfile.SetAside(path); err == nil && len(valid) > 0 {
		err = writeSettings(path, valid)
	}
	if err != nil {
		d.Problem += "; " + err.Error()
	}
	return d
}

// SaveSettings changes the file of saved settings; a nil value removes a key. A file that
// is not valid is left as it is, which is an error.
//
// Callers serialize their own calls (the daemon with a lock). Two processes that save at the
// same time both succeed, and the later one may undo the earlier: the file is changed by hand
// or by a person's command, rarely enough for that.
func SaveSettings(path string, change Settings) error {
	saved, errs := readSaved(path)
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
	return writeSettings(path, saved)
}

// writeSettings replaces the file of saved settings.
func writeSettings(path string, s Settings) error {
	text, err := settingsText(s)
	if err != nil {
		return err
	}
	if err = atomicfile.MkdirAll(filepath.Dir(path), 0o700); err == nil {
		err = atomicfile.Replace(path, text)
	}
	// The path of the error is that of a temporary file, which nobody can look for.
	pathErr, link := (*fs.PathError)(nil), (*os.LinkError)(nil)
	switch {
	case errors.As(err, &pathErr):
		err = pathErr.Err
	case errors.As(err, &link):
		err = link.Err
	}
	if err != nil {
		return fmt.Errorf("save the settings in %s: %w", path, err)
	}
	return nil
}

// settingsText returns the content of a file with these settings.
//
// The keys are sorted by the YAML library, so that equal settings give equal bytes.
func settingsText(s Settings) ([]byte, error) {
	if len(s) == 0 {
		return []byte(settingsHeader + settingsEnd), nil
	}
	values := map[string]any{}
	for name, v := range s {
		values[name] = Plain(v.Value)
	}
	b, err := yaml.Marshal(Nest(values))
	return slices.Concat([]byte(settingsHeader), b, []byte(settingsEnd)), err
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
