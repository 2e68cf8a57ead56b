package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// maxScopeFolders bounds the folders that DeclaredScopes reads.
const maxScopeFolders = 256

// Scopes returns the scopes that the loaded plugins declare, sorted.
func (h *Host) Scopes() (scopes []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.loaded {
		scopes = append(scopes, p.current.plugin.declared.Scopes()...)
	}
	slices.Sort(scopes)
	return scopes
}

// DeclaredScopes returns the scopes that the manifests in a plugin directory declare, sorted,
// whether a relay has loaded the plugins or not. A directory that is not there has none. A
// manifest that others may write or that is not valid counts as none; the error names all of
// these, and the scopes are those of the others.
//
// It does not ask who owns the files: a manifest decides which words may be granted, and not what
// the relay runs.
func DeclaredScopes(dir string) (scopes []string, err error) {
	root, err := os.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("open the plugin directory: %w", err)
	}
	defer func() { _ = root.Close() }()
	folders, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("read the plugin directory: %w", err)
	}
	folders = slices.DeleteFunc(folders, func(f fs.DirEntry) bool {
		return !f.IsDir() || !folderName.MatchString(f.Name()) || slices.Contains(reservedNames, f.Name())
	})
	var problems []error
	for _, f := range folders[:min(len(folders), maxScopeFolders)] {
		own, err := folderScopes(root, f.Name())
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, fmt.Errorf("plugin %s: %w", f.Name(), err))
		}
		scopes = append(scopes, own...)
	}
	slices.Sort(scopes)
	return scopes, errors.Join(problems...)
}

// folderScopes returns the scopes that the manifest in a plugin's folder declares.
func folderScopes(root *os.Root, name string) ([]string, error) {
	// As in open, but the owner is not checked. A link is refused, since its mode is 0777.
	for _, path := range []string{".", name, filepath.Join(name, manifestFile)} {
		st, err := root.Lstat(path)
		if err != nil {
			return nil, err
		}
		if st.Mode().Perm()&0o022 != 0 || !st.IsDir() && !st.Mode().IsRegular() {
			return nil, fmt.Errorf("%s must not be a link, and other users must not write to it", path)
		}
	}
	raw, err := readManifest(root, name)
	if err != nil {
		return nil, err
	}
	m, err := ParseManifest(raw)
	if err != nil {
		return nil, err
	}
	if m.Name != name {
		return nil, fmt.Errorf("its manifest names the plugin %s", m.Name)
	}
	return m.Scopes(), nil
}
