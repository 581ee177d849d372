// Tables of virtual functions made at run time, with the places that the headers give to each.
//
// A class that derives from one of TensorRT's interfaces has to define all of their functions, which are hundreds and
// differ between releases. A table defines those that the fakes serve; a call of any other ends the process.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <typeinfo>

namespace fake {

template <class Function>
struct Given {
    using type = Function;
};

// `Owner` is found behind an object's table.
template <class Interface, class Owner>
struct Face {
    const void *table;
    Owner *owner;

    Interface *as_interface() { return reinterpret_cast<Interface *>(this); }
};

template <class Interface, class Owner>
class Table {
public:
    Table() {
        // As the compiler lays them out: offset to the whole object, type, functions.
        all_[0] = nullptr;
        all_[1] = const_cast<std::type_info *>(&typeid(Interface));
        for (std::size_t place = 0; place < places; ++place) all_[place + 2] = reinterpret_cast<void *>(&unexpected);
    }

    template <class Result, class... Arguments>
    Table &on(Result (Interface::*method)(Arguments...),
              typename Given<Result (*)(Face<Interface, Owner> *, Arguments...)>::type body) {
        return put(place_of(method), reinterpret_cast<void *>(body));
    }
    template <class Result, class... Arguments>
    Table &on(Result (Interface::*method)(Arguments...) const,
              typename Given<Result (*)(Face<Interface, Owner> *, Arguments...)>::type body) {
        return put(place_of(method), reinterpret_cast<void *>(body));
    }
    // The destructor that `delete` calls, for interfaces that stand it right behind `method`.
    template <class Method>
    Table &on_delete_behind(Method method, void (*body)(Face<Interface, Owner> *)) {
        return put(place_of(method) + 2, reinterpret_cast<void *>(body));
    }

    Face<Interface, Owner> face(Owner *owner) const { return {all_.data() + 2, owner}; }

private:
    static constexpr std::size_t places = 128;

    static void unexpected() {
        std::fprintf(stderr, "a function of %s that the fake does not serve was called\n", typeid(Interface).name());
        std::abort();
    }

    // A pointer to a virtual function is one more than its distance in the table, in bytes.
    template <class Method>
    static std::size_t place_of(Method method) {
        std::ptrdiff_t distance[2];
        static_assert(sizeof method == sizeof distance);
        std::memcpy(distance, &method, sizeof distance);
        return static_cast<std::size_t>(distance[0] - 1) / sizeof(void *);
    }

    Table &put(std::size_t place, void *body) {
        all_.at(place + 2) = body;
        return *this;
    }

    std::array<void *, places + 2> all_;
};

}  // namespace fake
