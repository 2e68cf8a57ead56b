package history

// maxKeys is how many names of readings there may be: a reading's id has one byte for it.
const maxKeys = 255

// keyring numbers the names of readings, from 1. The zero value is ready.
type keyring struct {
	names []string // names[id-1]
	ids   map[string]uint8
}

// id is the number of a name; a new one is added while there is room.
func (k *keyring) id(name string) (uint8, bool) {
	if id, ok := k.ids[name]; ok {
		return id, true
	}
	if len(k.names) == maxKeys || !validKey(name) {
		return 0, false
	}
	if k.ids == nil {
		k.ids = map[string]uint8{}
	}
	k.names = append(k.names, name)
	id := uint8(len(k.names))
	k.ids[name] = id
	return id, true
}

// validKey tells whether name is 1..64 printable ASCII characters.
func validKey(name string) bool {
	if name == "" || len(name) > 64 {
		return false
	}
	for i := range len(name) {
		if name[i] < ' ' || name[i] > '~' {
			return false
		}
	}
	return true
}
