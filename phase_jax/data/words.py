"""English words for keys and values; the lab's vocabulary takes its words from the front of each list."""

ANIMALS = (
    "ant ape badger bat bear beaver bee bison boar camel cat cheetah cobra cow crab crane crow deer dog dolphin dove"
    " duck eagle eel elk falcon ferret finch fox frog gecko goat goose gull hare hawk heron horse hyena jackal koala"
    " lemur lion lizard llama lynx mole moose mouse newt otter owl panda parrot pig puma rabbit raven seal shark sheep"
    " snail swan tiger bird buck buffalo bull bunny butterfly calf carp caterpillar chick chicken clam cod colt cougar"
    " cricket doe donkey dragon elephant fish flea fly hamster hen hog kitten kitty lamb leopard lobster mare monkey"
    " mosquito moth ox oyster pigeon pony pup puppy ram rat salmon shrimp slug snake spider squirrel stag trout tuna"
    " turkey turtle viper whale wolf worm yak beetle"
).split()

NAMES = (
    "Ada Alan Alice Amos Anna Ben Bella Boris Carl Clara Cora Dan Dora Edith Elias Emma Erik Eva Felix Flora Frank"
    " Fred Gina Grace Greta Hans Hugo Ida Igor Ines Iris Ivan Jack Jane Jonas Julia Karl Kate Lars Laura Leo Lena Lily"
    " Lucas Maria Mark Max Mia Nina Nora Oscar Otto Paul Peter Rosa Ruth Sam Sara Simon Tess Thea Tom Vera Walter"
    " Aaron Adam Albert Amy Andrea Andrew Angela Ann Arthur Barbara Beth Bob Brian Bruce Carlos Carol Chris Claire"
    " Craig Daniel David Dennis Diana Donald Donna Dylan Edward Ellen Eric Ethan Evan Gary George Greg Harry Heather"
    " Helen Henry Howard Isaac James Jason Jean Jennifer Jessica Jim Joan Joe John Joseph Joshua Julian Julie Karen"
    " Keith Kelly Kevin Larry Linda Lisa Louis Lucy Luke Martha Martin Mary Michael Mike Nancy Nathan Neil Nick Nicole"
    " Oliver Olivia Patrick Phil Rachel Ralph Rebecca Richard Robert Robin Roger Roy Ryan Sally Sandra Scott Sharon"
).split()
