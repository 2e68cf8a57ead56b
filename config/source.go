package config

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
)

// SettingsFile is the file of saved settings, in the state directory.
const SettingsFile = "settings.yaml"

// maxConfD bounds the files in conf.d.
//
// More are an error and not ignored: which ones would be left out is hard to see.
const maxConfD = 64

// Source names the places from which a configuration is read.
//
// A Source is a value: it is copied, and holds no open files. Flags may come from a command
// line or, as in the demo and in doctor, from a program; their Origin says so.
type Source struct {
	Path      string // of the file; its conf.d is beside it
	Required  bool   // the file must exist
	ForDaemon bool   // this process uses the configuration: a relay needs a token, and saved settings must be readable
	LookupEnv func(string) (string, bool)
	Flags     Settings // take precedence over everything else
	// SetAside makes Load set a damaged file of saved settings aside, and go on with those in it that
	// are valid: it is the program that writes the file, and a board must start without a person.
	SetAside bool
	NoSaved  bool // leave the saved settings out: the disk that they are on does not answer
}

// NewSource returns the source of this user, or of the service. path names another file, which
// must exist.
//
// The path becomes absolute, so that origins and errors name the file in full.
func NewSource(path string) Source {
	s := Source{Path: path, Required: path != "", LookupEnv: os.LookupEnv}
	if path == "" {
		s.Path = DefaultPath()
	}
	if abs, err := filepath.Abs(s.Path); err == nil {
		s.Path = abs
	}
	return s
}

// ClientSource returns the source that a command of a person shows and changes: that of the
// service when this user has no configuration.
//
// A person on a board with the service means the service: without this a first `config show`
// would print the defaults of a daemon that nobody runs. The state directory goes with it.
func ClientSource(path string) Source {
	s := NewSource(path)
	s.Flags = Settings{}
	if path == "" && !exists(s.Path) && exists(SystemPath) {
		s.Path = SystemPath
		s.Flags["state_dir"] = Setting{SystemStateDir, "the service"}
	}
	return s
}

// Load reads and checks all sources. Its error is an Errors with everything that is wrong.
//
// Later sources overwrite earlier ones key by key; lists are replaced and not merged. The order
// is defaults, file, conf.d, saved settings, environment, flags, as in the package comment.
// What depends on several keys is checked only when every key is valid alone, because it would
// otherwise report consequences of other errors.
func (s Source) Load() (*Config, error) {
	c := &Config{Settings: Settings{}}
	for i := range keys {
		c.Settings[keys[i].Name] = Setting{keys[i].def(), "default"}
	}
	errs := c.addFile(s.Path, s.Required)
	others, err := s.confD()
	if err != nil {
		errs = append(errs, err)
	}
	for _, path := range others {
		errs = append(errs, c.addFile(path, false)...)
	}
	overrides, envErrs := s.environment()
	errs = append(errs, envErrs...)
	maps.Copy(overrides, s.Flags)
	// The saved settings cannot set the path of their own directory; every other source can.
	if stateDir, found := overrides["state_dir"]; found {
		c.Settings["state_dir"] = stateDir
	}
	errs = append(errs, s.addSaved(c)...)
	maps.Copy(c.Settings, overrides)
	if len(errs) == 0 {
		errs = c.checkTogether(s.ForDaemon)
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return c, nil
}

// addFile adds the settings of a file, and returns its errors.
//
// The valid settings of a file count even when others are wrong: Load fails then anyway, but
// finds more errors.
func (c *Config) addFile(path string, required bool) Errors {
	given, errs := ReadFile(path)
	if !required && IsMissing(errs) {
		return nil
	}
	c.Files = append(c.Files, path)
	maps.Copy(c.Settings, given)
	return errs
}

// addSaved adds the saved settings. A person who may not read them gets a note instead.
//
// state_dir and socket are refused there: the path of the file itself depends on state_dir.
func (s Source) addSaved(c *Config) Errors {
	if s.NoSaved {
		return nil
	}
	path := c.SettingsPath()
	saved, errs := readSaved(path)
	switch {
	case IsMissing(errs):
		return nil
	case len(errs) == 1 && errors.Is(errs[0], fs.ErrPermission) && !s.ForDaemon:
		c.Notes = append(c.Notes, "settings saved in "+path+" are not shown: permission denied; use sudo")
		return nil
	}
	c.Files = append(c.Files, path)
	for _, name := range []string{"state_dir", "socket"} {
		if v, found := saved[name]; found {
			errs = append(errs, &Error{Where: v.Origin, Key: name, Problem: "cannot be set here, where it decides what is read; write it into " + s.Path})
			if s.SetAside {
				delete(saved, name)
			}
		}
	}
	if s.SetAside && len(errs) > 0 {
		c.Damage = setAsideSaved(path, saved, errs)
		errs = nil
	}
	maps.Copy(c.Settings, saved)
	return errs
}

// environment reads the variables. An empty one counts as not set.
//
// systemd units and containers cannot unset a variable that a file set, but can make it empty.
func (s Source) environment() (Settings, Errors) {
	out := Settings{}
	var errs Errors
	for i := range keys {
		k := &keys[i]
		text := ""
		if k.Env() != "" {
			text, _ = s.LookupEnv(k.Env())
		}
		if text == "" {
			continue
		}
		v, err := k.Parse(text)
		if err != nil {
			errs = append(errs, &Error{Where: k.Env(), Key: k.Name, Problem: err.Error()})
			continue
		}
		out[k.Name] = Setting{v, k.Env()}
	}
	return out, errs
}

// confD returns the files of conf.d, sorted by name. Hidden files, and those that do not
// end in .yaml or .yml, are left out: editors and package managers leave such files behind.
func (s Source) confD() ([]string, error) {
	dir := filepath.Join(filepath.Dir(s.Path), "conf.d")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	var paths []string
	for _, e := range entries {
		if name := e.Name(); !strings.HasPrefix(name, ".") && (strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml")) {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	if len(paths) > maxConfD {
		return nil, &Error{Where: dir, Problem: fmt.Sprintf("%d files, at most %d are read; join some", len(paths), maxConfD)}
	}
	return paths, nil
}

// Fingerprint changes when one of the files of a configuration changes. The files that keys
// name, such as token_file and ca_file, are not part of it.
//
// It covers files that do not exist yet: the error of stat is part of it. Size and inode are
// there because a time may repeat: ext4 has ticks of some milliseconds, and a clock that NTP
// sets back may give an old time again. It is compared and not stored.
func (s Source) Fingerprint(c *Config) string {
	others, err := s.confD()
	var sb strings.Builder
	fmt.Fprintln(&sb, err)
	for _, path := range append([]string{s.Path, c.SettingsPath()}, others...) {
		fmt.Fprintln(&sb, path, fingerprint(path))
	}
	return sb.String()
}
